// Package docs_test checks what the documents promise: their words and links, programs, errors, formats and alerts, and that
// the packages import each other as CONTRIBUTING.md says.
package docs_test

import (
	"fmt"
	"os"
	"testing"

	_ "modernc.org/sqlite"

	"github.com/tenurelib/tenure/internal/testkit"
)

// The tests run in the directory of the root module, where the documents' paths begin.
func TestMain(m *testing.M) {
	if err := os.Chdir("../.."); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	testkit.Main(m)
}
