"""Pure array functions: no parameters, no state, no devices."""
