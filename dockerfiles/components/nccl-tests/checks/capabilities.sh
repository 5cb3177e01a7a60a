# Reads the headers of the fat binaries: each part is PTX (kind 1) or machine code (kind 2) for one capability.
cat > /tmp/capabilities.pl <<'EOF'
EOF
