"""The worker process: reconciles models to the catalogue, runs their engines, publishes their tokens."""
