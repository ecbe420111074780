//go:build unix

package testkit

import (
	"fmt"
	"os"
	"os/user"
	"strconv"
	"syscall"
)

// processAttr makes the server's programs run in a separate process group, so that Ctrl-C
// in the terminal ends only the tests, which then end the server. If the tests run as
// root, which PostgreSQL refuses, the programs run as an unprivileged user, which becomes
// the owner of dir.
func processAttr(dir string) (*syscall.SysProcAttr, error) {
	attr := &syscall.SysProcAttr{Setpgid: true}
	if os.Geteuid() != 0 {
		return attr, nil
	}
	account, err := user.Lookup("postgres")
	if err != nil {
		account, err = user.Lookup("nobody")
	}
	if err != nil {
		return nil, fmt.Errorf("kit: no user to run PostgreSQL as: %w", err)
	}
	uid, err := strconv.ParseUint(account.Uid, 10, 32)
	if err != nil {
		return nil, fmt.Errorf("kit: user %s: %w", account.Username, err)
	}
	gid, err := strconv.ParseUint(account.Gid, 10, 32)
	if err != nil {
		return nil, fmt.Errorf("kit: user %s: %w", account.Username, err)
	}
	attr.Credential = &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}
	if err := os.Chown(dir, int(uid), int(gid)); err != nil {
		return nil, fmt.Errorf("kit: %w", err)
	}
	return attr, nil
}
