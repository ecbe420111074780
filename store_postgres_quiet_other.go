//go:build !unix

package tenure

import "net"

// isQuiet reports that an idle connection must be asked whether it lives.
func isQuiet(net.Conn) bool { return false }
