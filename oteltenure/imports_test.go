package oteltenure_test

import (
	"os/exec"
	"strings"
	"testing"
)

// Go may build this module with a later version of the root module than the one that go.mod names.
func TestTheModuleImportsNoInternalPackage(t *testing.T) {
	out, err := exec.CommandContext(t.Context(), "go", "list", "-f", `{{join .Imports "\n"}}`, "./...").Output()
	must(t, err)
	imports := strings.Fields(string(out))
	if len(imports) < 5 {
		t.Errorf("found only %q", imports)
	}
	for _, path := range imports {
		if strings.Contains(path, "/internal/") {
			t.Errorf("the module imports %s", path)
		}
	}
}
