"""Parts that mechanisms share: projections, norms, rotary encoding, feeds, the window, MLPs, marks on parameters."""
