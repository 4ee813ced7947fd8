/* NCCL functions that torch 2.14 looks up and FakeGPU 1.5.5 lacks. Nothing here calls them; each returns ncclInternalError. */
#define MISSING(name) int name(void) { return 3; }
MISSING(ncclCommGetUniqueId)
MISSING(ncclCommGrow)
MISSING(ncclCommRevoke)
MISSING(ncclGather)
MISSING(ncclWinGetUserPtr)
