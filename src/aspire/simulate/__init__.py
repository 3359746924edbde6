"""Discrete-event simulation of a batch: the engine's own Scheduler and cadences, with acceptance given by curves and
time by a cost model, so that policies are compared in seconds on any machine."""
