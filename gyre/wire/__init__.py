"""What processes say to one another: typed messages, their codec, their bulk arrays."""
