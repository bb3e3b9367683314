// expected: the text ends inside a region
"builtin.module"() ({
  "func.func"() ({
    "func.return"() : () -> ()
