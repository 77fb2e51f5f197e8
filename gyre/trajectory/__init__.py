"""Pure: from the calls of an execution to the trajectories trained."""
