"""Trainers that mark their batches and compile their models; each module needs the framework that it is named after."""
