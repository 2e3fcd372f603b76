"""Other libraries' interfaces, so that their users change one import."""
