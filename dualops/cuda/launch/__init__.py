"""From a call to a launch: which kernel runs, with which arguments, on which device."""
