"""The checks of `mesh-transformer doctor`: does this machine have what the commands need?

They run where packages are missing and on older versions of Python: here, and in the modules that this package imports
at its top, is only the standard library. JAX is imported in a child process.
"""
