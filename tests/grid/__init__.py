"""The grid of pairs, modes and orders that polybridge promises."""
