"""Programs that show what polybridge is for; run one with `python -m examples.<name>`."""
