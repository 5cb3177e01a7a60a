// STAND-IN: the names that NCCL looks for.
struct plugin { const char *name; };
#define PLUGIN(kind, version) struct plugin kind##_##version = {"stand-in"};
#define VERSIONS(kind) PLUGIN(kind, v8) PLUGIN(kind, v9) PLUGIN(kind, v10) PLUGIN(kind, v11)
VERSIONS(ncclNetPlugin)
VERSIONS(ncclCollNetPlugin)
