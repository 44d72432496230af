"""A last projection with a cross entropy after it, cut along its classes into units of their own."""
