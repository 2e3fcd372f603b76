"""The tests of polybridge, one folder for each part of it."""
