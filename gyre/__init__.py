"""gyre: an elastic reinforcement-learning toolkit for coding agents whose single execution lasts hours."""
