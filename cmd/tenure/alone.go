//go:build unix

package main

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/tenurelib/tenure/internal/sqliteobjects"
)

// soleProcess is a process that has a SQLite file to itself, because it has opened it without
// [tenure.SQLiteConfig.Shared]. Its coordinators run their jobs without a record in the file.
type soleProcess struct {
	PID     int    `json:"pid,omitempty"`     // 0: unknown
	Program string `json:"program,omitempty"` // empty: unknown
}

// alone returns the process that has the store to itself; nil: there is none. Such a process has locked a file
// beside the database, and has written its PID into it. Only trying shows whether it is locked; a process that
// opens the database without Shared in that instant tries again.
func (s *storeFlag) alone() *soleProcess {
	name, err := s.name()
	if err != nil || schemeOf(name) != nil {
		return nil
	}
	path, err := filepath.EvalSymlinks(name)
	if err != nil {
		return nil
	}
	pid, locked := sqliteobjects.Holder(path, cmp.Or(s.table, "objects"))
	if !locked {
		return nil
	}
	p := &soleProcess{}
	if pid != 0 {
		program, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid)) // which Linux has
		p.PID, p.Program = pid, strings.TrimSpace(string(program))
	}
	return p
}

func (p *soleProcess) explain() string {
	who := "one process"
	if p.PID != 0 {
		who = fmt.Sprintf("process %d", p.PID)
	}
	if p.Program != "" {
		who += " (" + printable(p.Program) + ")"
	}
	return who + " has the file to itself (it was opened without Shared), and its leases are in that process only"
}
