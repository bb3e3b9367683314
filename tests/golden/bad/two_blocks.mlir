// expected: a region has at most one block
"builtin.module"() ({
^bb0:
^bb1:
}) : () -> ()
