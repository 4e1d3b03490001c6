"""`make layouts`: compares results and gradients of every op in the table with eager mode, values and strides, in seven operand layouts."""
