//go:build !unix

package pgconns

import "net"

// IsQuiet always returns false, so that an idle connection is pinged.
func IsQuiet(net.Conn) bool { return false }
