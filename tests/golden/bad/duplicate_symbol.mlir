// expected: the symbol @main is defined twice
"builtin.module"() ({
  "func.func"() ({
    "func.return"() : () -> ()
  }) {sym_name = "main", function_type = () -> ()} : () -> ()
  "func.func"() ({
    "func.return"() : () -> ()
  }) {sym_name = "main", function_type = () -> ()} : () -> ()
}) : () -> ()
