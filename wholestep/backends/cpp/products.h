// One function for all that is made of tiles: the first tensor says what is to be done and with which sizes.

extern "C" int kernel_name(void** tensors) {
  const i64 what = *(const i64*)tensors[0];
  if (what == 0) product(tensors);
  else if (what == 1) attention(tensors);
  else if (what == 2) attention_gradients(tensors);
  else grouped(tensors);
  return 0;
}
