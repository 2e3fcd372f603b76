"""More than one process or device, each test in processes of its own with a hard limit of time."""
