"""Trainers: seconds of an update and of a scoring pass, bytes of states and activations, by layout."""
