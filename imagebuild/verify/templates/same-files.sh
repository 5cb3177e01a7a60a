# shellcheck disable=SC2154  # nonce, folders, trees and files are set before this script
# Print the hashes of files and the targets of symlinks: all of `folders`, everything below `trees`, and `files`.
# A line is `HASH  PATH`, `link PATH`, or the target of such a link. The hash of `nonce` proves the program.
shopt -s nullglob dotglob globstar
sha256sum < <(printf %s "$nonce") # not a pipe: a program that does not read must not end this script
for folder in "${folders[@]}"; do files+=("/$folder"/*); done
for tree in "${trees[@]}"; do files+=("/$tree"/**); done
regular=() links=()
for path in "${files[@]}"; do
  if [[ -L $path ]]; then links+=("$path"); elif [[ -f $path ]]; then regular+=("$path"); fi
done
# Few files each, so that the output of several programs is not mixed. The status is 123 if a file cannot be read.
printf '%s\0' "${regular[@]}" | xargs -0 -r -n 8 -P "$(nproc)" sha256sum -- || [ $? = 123 ]
for path in "${links[@]}"; do printf 'link %s\n' "$path"; done
if [ "${#links[@]}" -gt 0 ]; then readlink -- "${links[@]}"; fi
