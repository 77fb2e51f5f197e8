"""Pure rules of scheduling: state and time in, decision and reason out."""
