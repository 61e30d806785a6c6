"""Measurements of a bundle on this machine: what its methods gain, which trees and sizes pay, what steps cost."""
