"""Bridged models on more than one machine, by the engines that each framework has for it; see docs/distributed.md."""
