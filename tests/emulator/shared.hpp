#define DYNAMIC_SHARED(name) unsigned char *const name = emulated::dynamic_shared()
