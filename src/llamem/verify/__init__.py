"""Proofs that rematerialisation is on and right, for anyone's loss."""

from llamem.verify.proof import Proof, Title
from llamem.verify.verification import Verification, assert_remat, verify_remat

__all__ = ["Proof", "Title", "Verification", "assert_remat", "verify_remat"]
