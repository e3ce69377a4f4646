"""Proofs that rematerialisation is on and right, for anyone's loss."""
