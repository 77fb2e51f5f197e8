"""Simulated worlds that run the production rules, machines and loops."""
