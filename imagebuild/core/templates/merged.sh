# shellcheck shell=bash
# Print NCCL's messages, which ranks print with `keep_messages`, only once, and name the ranks unless all printed a message.
# The channels of a connection become one line, such as `Channel 00-15/0`. Other lines pass at once.
merged() {
  trap '' HUP INT TERM # what ranks print when they are told to stop must still come out
  local options=()
  # mawk waits for whole blocks otherwise. With this option, mawk 1.3.4-20240123 of Ubuntu 24.04 ends at a line of 4096 bytes.
  if [ "$(printf '%5000s\n' x | awk -W interactive '{ print length($0) }' 2>&1)" = 5000 ]; then options=(-W interactive); fi
  LC_ALL=C awk "${options[@]}" '
    function end_of(text) { return text in last ? "-" last[text] : "" }
    !match($0, /^\(rank [0-9]+\) /) { print; fflush(); next }
    {
      rank = substr($0, 7, RLENGTH - 8) + 0
      if (!ranks[rank]++) total++
      if (rank > highest) highest = rank
      line = substr($0, RLENGTH + 1)
      sub(/ +$/, "", line)
      text = line
      # without the process, and without addresses in its memory
      if (match(text, / NCCL /)) text = substr(text, RSTART + RLENGTH)
      gsub(/0x[0-9a-f]+/, "0x", text)
      channel = ""
      if (match(text, /^INFO (Channel|Ring) [0-9]+/)) {
        channel = substr(text, 1, RLENGTH)
        text = substr(text, RLENGTH + 1)
        sub(/^.* /, "", channel)
      }
      if (!(text in first)) { first[text] = line; order[++count] = text }
      if (!said[text, rank]++) speakers[text]++
      if (channel == "" || joined[text, channel]++) next
      if (!(text in before)) channels[text] = channel
      else if (channel - before[text] == 1) last[text] = channel
      else { channels[text] = channels[text] end_of(text) "," channel; delete last[text] }
      before[text] = channel
    }
    END {
      for (i = 1; i <= count; i++) {
        text = order[i]; line = first[text]; names = ""
        for (rank = 0; speakers[text] < total && rank <= highest; rank++) {
          if (!((text, rank) in said)) continue
          for (to = rank; (text, to + 1) in said; to++);
          names = names (names == "" ? "" : ",") rank (to > rank ? "-" to : "")
          rank = to
        }
        if (text in channels && match(line, / (Channel|Ring) [0-9]+/)) {
          word = substr(line, RSTART, RLENGTH)
          sub(/[0-9]+$/, "", word)
          line = substr(line, 1, RSTART - 1) word channels[text] end_of(text) substr(line, RSTART + RLENGTH)
        }
        print (names == "" ? "" : "(rank" (names ~ /[-,]/ ? "s " : " ") names ") ") line
      }
    }'
}
