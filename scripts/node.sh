# Sourced by scripts that use a node: starts one on a directory and a free port, and ends it.
harena=$PWD/bin/harena

# start_node DATA LOG [ADDR]: returns when it is ready; exports HARENA_URL and HARENA_TOKEN.
start_node() {
	node_data=$1 node_log=$2
	"$harena" up --data "$node_data" --listen "${3:-127.0.0.1:0}" >"$node_log" 2>&1 &
	node_pid=$!
	until grep -q '^ready' "$node_log"; do
		if ! kill -0 "$node_pid" 2>/dev/null; then
			grep -v '^opening ' "$node_log" >&2 || true
			node_pid=
			echo "${0##*/}: the node did not start" >&2
			return 1
		fi
		sleep 0.05
	done
	export HARENA_URL HARENA_TOKEN
	HARENA_URL=$(sed -n 's/.*"url": *"\([^"]*\)".*/\1/p' "$node_data/client.json")
	HARENA_TOKEN=$(sed -n 's/.*"token": *"\([^"]*\)".*/\1/p' "$node_data/client.json")
}

# stop_node: ends the node that start_node started, if any, with all its sandboxes.
stop_node() {
	[ -n "${node_pid:-}" ] || return 0
	if "$harena" down --data "$node_data" >>"$node_log" 2>&1; then
		wait "$node_pid" 2>/dev/null || true
		node_pid=
		return 0
	fi
	echo "${0##*/}: harena down --data $node_data failed:" >&2
	tail -n 20 "$node_log" >&2
	return 1
}
