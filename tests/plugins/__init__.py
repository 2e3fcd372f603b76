"""Tests of backends that strangers bring: the toy plugin on both sides of the built-in ones."""
