"""The contracts: AllSpark service, fleet envelopes, Redis records. Imports nothing of ours."""
