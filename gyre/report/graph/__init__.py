"""Drawings of prefix graphs: where they come from, how they are laid out, as text, SVG, page."""
