"""An open model on its mesh: devices, weights, decoding engine."""
