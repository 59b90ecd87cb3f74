"""Engines that come with the package: an echo and an n-gram model, behind one scheduler loop."""
