"""Benchmarks of emaopt beside what a user would pick instead."""
