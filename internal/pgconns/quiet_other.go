//go:build !unix

package pgconns

import "net"

// IsQuiet reports that an idle connection must be asked whether it lives.
func IsQuiet(net.Conn) bool { return false }
