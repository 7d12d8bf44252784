package harena

import "unicode/utf8"

// argv puts arguments into the field that can hold them.
func argv(args []string) ([]string, [][]byte) {
	for _, a := range args {
		if !utf8.ValidString(a) {
			raw := make([][]byte, len(args))
			for i, a := range args {
				raw[i] = []byte(a)
			}
			return nil, raw
		}
	}
	return args, nil
}

// text splits a string into a field for UTF-8 and one for any bytes.
func text(s string) (string, []byte) {
	if utf8.ValidString(s) {
		return s, nil
	}
	return "", []byte(s)
}
