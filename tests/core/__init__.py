"""Tests of polybridge.core, which run on the toy plugin and on fakes, and import no real framework."""
