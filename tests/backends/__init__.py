"""Tests of single backends."""
