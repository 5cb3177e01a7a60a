here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
stack_load() {
  export STACK_DIR=$here STACK_EMPTY='' STACK_TESTS=$here/mpi/tests STACK_CHOICE=a/b
  export OLD_PATH=$PATH PATH=$here/ucx/bin:$PATH
  export LD_LIBRARY_PATH=$here/net/lib:$here/ucx/lib:$here/sharp/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}:
  echo "a script may print what it likes"
}
