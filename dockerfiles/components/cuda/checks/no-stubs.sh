if ldconfig -p | grep -F /stubs/; then exit 1; fi
case ":${LD_LIBRARY_PATH:-}:" in *stubs*) exit 1 ;; esac
