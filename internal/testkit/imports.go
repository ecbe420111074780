package testkit

import (
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// OnlyPublicImports checks that the module of the calling test imports only public packages of the
// root module, but for those below this one in its tests. A program may choose a newer version of the root
// module than the one that the calling module was tested with, and only public packages keep their
// promises from one version to the next.
func OnlyPublicImports(t *testing.T) {
	t.Helper()
	const root = "github.com/tenurelib/tenure"
	imports := func(field string) []string {
		out, err := exec.Command("go", "list", "-f", `{{join `+field+` "\n"}}`, "./...").Output()
		require.NoError(t, err)
		return strings.Fields(string(out))
	}
	product := imports(".Imports")
	require.Contains(t, product, root)
	tests := append(imports(".TestImports"), imports(".XTestImports")...)
	tests = slices.DeleteFunc(tests, func(path string) bool { return strings.HasPrefix(path, root+"/internal/testkit") })
	for _, path := range append(product, tests...) {
		if strings.HasPrefix(path, root) {
			require.NotContains(t, path+"/", "/internal/")
		}
	}
}
