"""The theorem as a test: production loops and machines in a deterministic world with faults, judged by checkers that share no code with them."""
