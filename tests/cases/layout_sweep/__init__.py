"""Every op of the table, with operands in seven layouts: results and gradients in eager mode's strides, with its values. `make layouts`."""
