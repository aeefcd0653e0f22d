"""Sparse prefill: an estimate of each key tile's mass, the choice by a target, and the lists that kernels walk."""
